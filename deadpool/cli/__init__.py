"""The command line: one file per command. Nothing here loads torch."""
