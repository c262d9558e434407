"""gptlab: an interactive scaling lab for GPTs."""

__version__ = "0.1.0"
