"""Values checked against a type: one by one, as columns, as rows."""
