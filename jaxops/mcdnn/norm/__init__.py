"""Batch normalization and normalization, and what all of their calls share.

`normalization_*` are the second generation of `batch_normalization_*` and compute the same. PER_CHANNEL is SPATIAL, and
the ops correspond one to one. Enumerations are given as a member, its name or its number. An array "like x" has the
shape and dtype of x.

Shared arguments:
  mode: what the statistics reduce, a `BatchNormMode` or `NormMode`. SPATIAL and PER_CHANNEL reduce batch and space,
    PER_ACTIVATION only the batch. SPATIAL_PERSISTENT is SPATIAL.
  bn_ops, norm_ops: what follows the normalization, a `BatchNormOps` or `NormOps`: nothing; an activation; or adding z
    and then an activation. Backward calls take those of the forward call.
  algo: a `NormAlgo`; it changes nothing.
  x: images of rank 4 or 5; float16, bfloat16, float32 or float64.
  dy: the gradient of the forward result, like x.
  scale: one factor per channel, of shape (1, C, 1, 1[, 1]); for PER_ACTIVATION one per activation, of shape
    (1, C[, D], H, W) whatever the layout. float32, or float64 for float64 images. "Like scale" below means this.
  bias: what is added after scaling, like scale.
  z: the residual, like x. Read only by OPS_BN_ADD_ACTIVATION and NORM_ADD_ACTIVATION.
  activation: an `ActivationDescriptor`. Read only by the ops that activate.
  exponential_average_factor: the weight of this batch in the running statistics, in [0, 1]: a Python or NumPy number,
    or a traced scalar, whose value is not checked. 1 / (1 + n) at call n, counted from 0, averages over all calls. At 1
    the old statistics are not read.
  running_mean, running_variance: the averages so far, like scale; both or neither. The variances are unbiased; with a
    single element to reduce, the biased one, 0, is taken.
  estimated_mean, estimated_variance: the statistics to normalize by, like scale; for example the running ones. The
    variance is not inverted.
  saved_mean, saved_inv_variance: the mean and 1 / sqrt(biased variance + epsilon) that the forward call returned, like
    scale; both or neither. Without them they are computed again.
  reserve_space: what the forward call returned.
  epsilon: what is added to the variance; at least BN_MIN_EPSILON, 0. Backward calls always check it, but use it only
    without the saved statistics.
  alpha, beta: the factors of the result and of the prior; the output is `alpha * result + beta * prior`. Each is a
    Python or NumPy number, or a traced scalar. At beta = 0 the prior is not read; a traced beta always needs one.
  y: like x. In forward calls the prior; in backward calls the result of the forward call.
  alpha_data_diff, beta_data_diff, dx: the same two factors and the prior for the gradient of x.
  alpha_param_diff, beta_param_diff, dscale, dbias: the same for the gradients of scale and bias; the priors are like
    scale.
  layout: "NCHW", "NHWC", "NCDHW" or "NDHWC"; None means channels first, by the rank of x.
  mean_var: in size queries, stands for the statistics, as scale does for the parameters; like scale. All arrays of
    these queries may be `jax.ShapeDtypeStruct`s.
  dz: in size queries, the gradient of z, like x. It may be None, and so may y of a backward call.
  group_cnt: must be 1.
  strict: whether to refuse, with MCDNN_STATUS_NOT_SUPPORTED, what these calls support but the documents do not:
    activations in channels-first layouts, fused activations other than RELU (and SWISH, forward), a z that is not
    float16, and bfloat16 where the documents' tables leave it out.

Shared errors, unless a function says otherwise:
  BadParamError: status MCDNN_STATUS_BAD_PARAM. An argument that is read, or a prior that a factor needs, is None; the
    rank is not 4 or 5; an array is not like x or scale where it must be; only one of two statistics is given; epsilon
    is too small or NaN; an enumeration, layout or factor is not one of the above; in a backward call, nothing tells the
    slope of the activation, or reserve_space is smaller than the size query of the forward call says.
  NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED. The dtype of x is not listed above, that of a parameter or
    statistic does not go with x, there are groups, or a backward call is given SWISH, which has no fused gradient.

Numerics: everything is computed and blended in the dtype of scale, and rounded once.

These documented errors cannot arise: a NULL handle, workspace or output (there are no handles and workspaces, and
outputs are returned); strides that do not match (JAX's arrays are packed); an output that differs from its input (it is
made like it, and a prior is checked); in training, one saved statistic without the other (both are returned);
RUNTIME_FP_OVERFLOW (of the vendor's persistent kernel); EXECUTION_FAILED (a failing device raises JAX's own error).
"""
