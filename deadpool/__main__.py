"""`python -m deadpool`."""

from deadpool.cli.main import app

if __name__ == "__main__":
    app()
