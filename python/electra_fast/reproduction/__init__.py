"""The paper's comparisons at equal compute: experiments, their runs side by side, and the report."""
