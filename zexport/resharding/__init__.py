"""Write a TrainingState for another world size or stage."""
