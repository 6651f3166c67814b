"""What commands print: tables for people, objects for programs."""
