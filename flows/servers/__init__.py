"""Where do Prefect, Ray and MLflow come from, embedded or given?"""
