"""Tasks of Django, which qdo runs."""

from __future__ import annotations

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task


@task
def add(one, two=0):
    return one + two


@task(takes_context=True, priority=100)
def say(context, word):
    return f"{word} {context.attempt}"


@task
async def double(number):
    return 2 * number


@task
def divide(number):
    return number / 0
