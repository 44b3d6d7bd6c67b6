"""`python -m lmforge` is the `lmforge` command; the launcher starts ranks this way."""

from lmforge.cli import main

if __name__ == "__main__":
    main()
