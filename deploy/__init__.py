"""Files for supervisors and monitoring. `holdfast deploy` writes them out; nothing here is imported.

`slurm`, `kubernetes` and `systemd` start SMPs; `alerts.yml` and `grafana.json` are for Prometheus and Grafana.
"""

__all__: list[str] = []
