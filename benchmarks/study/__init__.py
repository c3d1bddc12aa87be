"""The study: which objective's drafts are accepted most, measured by decoding, on two domains and two CPU cores."""
