"""What a cell's own process runs: sides, judging, racing. These import torch; the rest of a bench does not."""
