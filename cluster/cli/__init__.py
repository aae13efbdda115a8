"""The `airside` program."""

from airside.cluster.cli.program import app as app
from airside.cluster.cli.program import main as main
