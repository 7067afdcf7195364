"""Embeddings: rows of a table by id, and the gradient of the table, dense or for the looked-up rows only."""

from jaxops.embedding.api import embedding as embedding
from jaxops.embedding.embedding_row_gradients import RowGradients as RowGradients
from jaxops.embedding.embedding_row_gradients import embedding_row_gradients as embedding_row_gradients
from jaxops.embedding.operator import EMBEDDING as EMBEDDING
from jaxops.embedding.operator import EMBEDDING_DENSE_BACKWARD as EMBEDDING_DENSE_BACKWARD
