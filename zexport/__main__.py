"""``python -m zexport``: the same as the ``zexport`` command."""

from zexport.cli.main import main

if __name__ == "__main__":
    main()
