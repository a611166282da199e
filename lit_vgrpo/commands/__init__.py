"""The subcommands of ``lightning``: one module or folder each."""
