"""Packaging of qdo; settings of tools are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def read(name: str) -> str:
    """Return the text of a file of the project."""
    return (HERE / name).read_text(encoding="utf-8")


def version() -> str:
    """Return the version without importing the package, which needs its dependencies."""
    found = re.search(r'^__version__ = "([^"]+)"', read("src/qdo/_version.py"), re.MULTILINE)
    if found is None:
        raise SystemExit("src/qdo/_version.py does not set __version__")
    return found.group(1)


def brokers() -> list[str]:
    """Return the entry points of qdo's own brokers; see `qdo.brokers.registry`."""
    return read("src/qdo/brokers/entry_points.txt").splitlines()[1:]


# Ranges are what is tested. kazoo's internals are used by the embedded coordinator and are
# no public interface, so its range is the narrowest.
REQUIRES = [
    "kazoo>=2.11,<2.12",
    "gevent>=26.9,<27",
    "ujson>=6.1,<7",
    "click>=8.5,<9",
    "rich>=15,<16",
    "cronsim>=2.8,<2.9",
    "msgspec>=0.23,<0.24",  # converts bodies with a type
    "tomlkit>=0.13,<0.16",  # `qdo settings set` keeps the comments of people
]
AWS = [
    "boto3>=1.44,<2",
    "urllib3>=2.6.3,<3",  # which botocore uses, and allows with known vulnerabilities
    "protobuf>=7.36,<8",  # reads what the Kinesis Producer Library packs
]
# An extra: a compiled library of 4 MB that only apps with keys need.
ENCRYPTION = ["cryptography>=50,<51"]
METRICS = ["prometheus-client>=0.26,<1"]  # qdo-worker --http
HTTP = ["urllib3>=2.6.3,<3"]
SASL = ["pure-sasl>=0.6.2,<1"]
SQL = ["sqlalchemy>=2.0.40,<2.2"]
POSTGRESQL = ["psycopg[binary]>=3.3,<3.4"]
TRACING = ["opentelemetry-api>=1.30,<2"]
# Strangers send requests to these; Flask allows versions with known vulnerabilities.
DASHBOARD = ["flask>=3.1.1,<3.2", "werkzeug>=3.1.4,<4", "jinja2>=3.1.6,<4"]
# The database of the project is the broker, and the admin has the dashboard.
DJANGO = ["django>=5.2,<6.1", *POSTGRESQL, *DASHBOARD]
# All that a module of qdo outside of contrib imports. Frameworks stay with their apps.
ALL = [*AWS, *DASHBOARD, *ENCRYPTION, *HTTP, *METRICS, *POSTGRESQL, *SASL, *SQL, *TRACING]
DOCS = ["sphinx>=8.1,<9.1", "furo>=2025.9.25,<2026"]
TEST = [
    *ALL,  # ENCRYPTION makes certificates for servers of tests, too
    *DJANGO,
    "opentelemetry-sdk>=1.30,<2",  # exports the spans of tests
    "moto[s3,server]>=5.2,<6",
    "redis>=8.1,<9",  # docs/examples/redis_streams uses it
    "aws-kinesis-agg>=1.2.3,<2",  # packs records as producers do; reads them less well than qdo
    "six>=1.16,<2",  # which aws-kinesis-agg imports and does not name
    "standardwebhooks>=1.1,<2",  # verifies what qdo.programs.webhook signs
    "kubernetes-validate>=1.37,<1.38",  # schemas; docs/deployment.rst names their versions
    "pydantic>=2.14,<3",  # classes of bodies, which qdo converts without an extra
    "attrs>=26,<27",
    "pyyaml>=6.0.2,<7",
    "setuptools>=78.1.1",  # builds config/Containerfile without a network
    "pytest>=9.1,<9.2",  # tests/support/runs uses parts of it that are not public
    "pytest-timeout>=2.4,<3",
    "fastapi>=0.165,<0.166",  # with Starlette; docs/fastapi.rst has a program
    "uvicorn>=0.54,<0.55",
    "a2wsgi>=1.10.10,<1.11",  # mounts the dashboard in ASGI apps
    "httpx2>=2.16,<3",  # the TestClient of Starlette
    "gunicorn>=27,<28",  # serves the shop of docs/django.rst
    "django-stubs>=6.1,<6.2",
    "django-tasks>=0.12,<0.13",  # the tasks of Django 6, for earlier versions
    "selenium>=4.51,<5",  # looks at the dashboard in Chromium
    "hypothesis>=6.168,<7",
    # The libraries in the table of docs/async.rst.
    "aiosqlite>=0.22,<0.23",
    "anyio>=4.16,<5",
    "asyncpg>=0.32,<0.33",
    "httpx>=0.28,<0.29",
    "trio>=0.35,<0.36",
    "objgraph>=3.6,<4",  # for kazoo's own tests
    "mypy>=2.4,<2.5",
    "pyright[nodejs]==1.1.414",  # with its own node; checks tests/uses as an app's author does
    "ruff>=0.17.5,<0.18",
    "types-ujson>=5.10",
    "types-protobuf>=7,<8",
]

setup(
    # The package is `qdo`. On PyPI that name belongs to a program of 2012.
    name="qdo-queues",
    version=version(),
    description="Shares many ordered queues out to a fleet of workers, each queue to one at a time",
    long_description=read("README.rst") if (HERE / "README.rst").exists() else "",
    long_description_content_type="text/x-rst",
    license="MIT",
    python_requires=">=3.11",
    # Nothing but qdo: other projects have a package `workers`, too. The folder of that name is
    # installed as qdo.programs, to which the link qdo/programs points. src/ has a link to qdo and
    # nothing else, so that an editable installation is a path, which type checkers and editors
    # follow. The path of this folder would offer its `workers`, `tests` and `docs` to every app.
    packages=find_packages("src"),
    package_dir={"": "src"},
    package_data={
        "qdo": ["py.typed"],
        "qdo.brokers": ["entry_points.txt"],
        "qdo.postgresql": ["*.sql"],
        "qdo.dashboard": ["templates/*.html", "static/*"],
    },
    install_requires=REQUIRES,
    extras_require={
        "all": ALL,
        "aws": AWS,
        "dashboard": DASHBOARD,
        "django": DJANGO,
        "encryption": ENCRYPTION,
        "http": HTTP,
        "metrics": METRICS,
        "postgresql": POSTGRESQL,
        "sasl": SASL,
        "sql": SQL,
        "tracing": TRACING,
        "docs": DOCS,
        "test": TEST,
    },
    entry_points={
        "console_scripts": [
            "qdo = qdo.__main__:main",
            "qdo-worker = qdo.__main__:worker",
        ],
        "pytest11": ["qdo = qdo.testing.plugin"],
        "qdo.brokers": brokers(),
    },
    zip_safe=False,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: System Administrators",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
