"""Files for supervisors and monitoring, which `holdfast deploy` writes out. Nothing here is imported.

`slurm`, `kubernetes` and `systemd` start SMPs; `alerts.yml` and `grafana.json` are for Prometheus and Grafana.
"""

__all__: list[str] = []
