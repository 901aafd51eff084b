"""One file per task; the head of each says what it does, how long it takes and what score to expect."""
