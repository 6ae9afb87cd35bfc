"""The version of the kit. Other files read it from here."""

__version__ = "0.1.0"
