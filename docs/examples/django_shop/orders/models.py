from django.db import models


class Order(models.Model):
    customer = models.CharField(max_length=50)
    item = models.CharField(max_length=50)
    state = models.CharField(max_length=20, default="new")
