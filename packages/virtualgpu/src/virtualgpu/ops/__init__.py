"""What each operator does on a virtual GPU: one module a family of operators."""
