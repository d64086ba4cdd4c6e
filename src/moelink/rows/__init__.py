"""Work on rows between dispatch and combine: the rows that exist, whose number only the device knows.

==============  ========================================================================================================
activation      the gated activation between the two products, quantised for the second one; activation_kernel
gated           the same with gradients, for rows that stay in their dtype; gated_kernel
grouped_fp8     the kernel of a grouped product of fp8 rows and weights with scales by block
grouped_gluon   the same in Gluon, for compute capability 9.0; grouped_gluon_few, for few rows of each group
grouped_mxfp4   the same for weights in mxfp4; grouped_gluon_mxfp4, in Gluon for compute capability 9.0
grouped_choice  which of these kernels the host takes
dequantize      quantised rows as rows of a plain dtype, through which gradients flow; dequantize_kernel
choose          the experts of each token, and their weights; choice, choose_kernel
wide_product    the logits of a router; wide_product_kernel, for few tokens
scale_rows      gradients of combine, and conversions between dtypes; scale_rows_kernel
eager           eager calls of these operators without torch's dispatcher
common_kernel   parts of these kernels: launch constants, the division of rows into steps, the launch
==============  ========================================================================================================

Nothing of the transport uses this. Importing this package does not import triton; the modules of kernels do.
"""
