"""Options that several commands share, and how their text is read."""
