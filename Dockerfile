# ckptool without torch: everything but computing with values (cast, average, stats, --finite, --rtol, --atol) and real
# loads (--load, --model). Not built yet by its authors.
#
#     docker build -t ckptool .
#     docker run --rm -v "$PWD:/work" -u "$(id -u):$(id -g)" ckptool inspect model.pth
FROM python:3.13-slim AS build
WORKDIR /source
COPY setup.py setup.cfg pyproject.toml README.md LICENSE MANIFEST.in ./
COPY ckptool ckptool
# ckptool depends on torch, which --no-deps leaves out; the others by name.
RUN python -m venv /opt/ckptool \
    && /opt/ckptool/bin/pip install --no-cache-dir 'click>=8.0' 'tabulate>=0.9' \
    && /opt/ckptool/bin/pip install --no-cache-dir --no-deps .

FROM python:3.13-slim
COPY --from=build /opt/ckptool /opt/ckptool
RUN useradd --system --no-create-home ckptool
USER ckptool
WORKDIR /work
ENTRYPOINT ["/opt/ckptool/bin/ckptool"]
CMD ["--help"]
