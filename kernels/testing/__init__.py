"""What kernel tests share: tolerances and operand generators. Knows operators; is imported by no operator."""
