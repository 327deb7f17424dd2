"""Readers of training and prediction data: tables, GLUE, SQuAD and similar files, tagged text."""
