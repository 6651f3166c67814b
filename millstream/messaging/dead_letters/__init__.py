"""Dead letters: stored, listed, edited, redriven."""
