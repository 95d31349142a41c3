"""Command line: one file a command, thin: parse, build, call."""
