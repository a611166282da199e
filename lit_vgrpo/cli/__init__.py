"""The command ``lightning``: one module or folder per subcommand."""
