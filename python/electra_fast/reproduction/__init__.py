"""The paper's comparisons at equal compute: experiments, parallel runs, and the report."""
