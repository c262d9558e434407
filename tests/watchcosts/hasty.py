"""The drawing process without its rests, so that a quarter of an hour of pictures passes in a minute or two.

$ python -m hasty
"""

from __future__ import annotations

from gptlab.lab import drawing

if __name__ == "__main__":
    drawing.SHORTEST_S, drawing.BUSY_S, drawing.SHARE = 0.0, 0.0, 1.0
    drawing.main()
