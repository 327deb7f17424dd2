"""Readers of training and prediction data: tables, GLUE, SQuAD and its relatives, tagged text."""
