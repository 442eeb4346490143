"""Reading answers: final answers, numbers, quantities, units, LaTeX and words; pure."""
