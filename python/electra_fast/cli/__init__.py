"""The command line: `parser` has the commands and their arguments, `commands` runs them."""

from electra_fast.cli.commands import main as main
