"""The rules, by what they look at; importing a module registers its rules."""
