"""One file for each schema format, to and from the type model."""
