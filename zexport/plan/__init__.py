"""The plan: where every output byte comes from, decided before anything is written."""
