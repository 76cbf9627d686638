"""config.yaml: its schema, reading one, and the options of commands that repeat what it says."""
