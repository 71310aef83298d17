"""The axis names used in shape annotations, once for the whole package.

`samples ops ranks stages microbatches kernels classes quantiles levels width fan_in replicas nodes`
"""
