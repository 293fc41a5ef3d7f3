"""ZeRO files for another world size or stage: the whole state of a training, cut anew."""
