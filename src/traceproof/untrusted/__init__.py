"""Limits on what strangers give: names, files, answers, programs, and variables that their code sees."""
