"""What tests share: programs and servers that they start, data that they draw, bounds that they measure."""
