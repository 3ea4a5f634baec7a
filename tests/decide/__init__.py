"""What deciding makes of evidence, against the requirement text and on the real store."""
