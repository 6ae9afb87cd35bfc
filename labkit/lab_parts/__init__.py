"""What labs share: `Result` and `Run`, the panel of a lab, what is alike in their figures, networks with their memory by formula, and
programs for ranks."""
