"""Measures the gates' two error rates, per op_type: wrong answers let through, right answers refused."""
