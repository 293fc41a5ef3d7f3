"""Speed and memory of zexport, as ratios taken in one run on one machine."""
