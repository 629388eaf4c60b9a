# A live S3 server for e2e/test_weights.py. Its packages need an older python-dateutil than ours, so it has an image.
FROM python:3.11-slim-bookworm
RUN pip install --no-cache-dir moto==5.2.5 flask==3.1.3 flask-cors==6.0.5
USER 10001
EXPOSE 5000
ENTRYPOINT ["moto_server", "-H", "0.0.0.0", "-p", "5000"]
