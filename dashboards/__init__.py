"""The Grafana dashboards, as code: ``python -m dashboards.generate`` writes them to ``json/``."""
