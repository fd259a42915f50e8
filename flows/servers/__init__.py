"""Where do Prefect, Ray and MLflow come from, embedded or given?

Words: a server is *embedded* where penstock starts it below the storage, and *given* where the environment names it.
Public: `services` (which ones a command uses), `prefect_server`, `ray_local`, `nodes` (can every node do its part), `probes`.
"""
