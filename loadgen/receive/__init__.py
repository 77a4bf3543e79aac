"""Read answers: from bytes and their times to the record of a request."""
