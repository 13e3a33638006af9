"""The share of time by class of kernel."""

import numpy as np
import pytest
import torch

from zapex.agent import networks
from zapex.agent.kernel_classes import class_of, measure, shares

# Names as CUPTI reports them for steps of this network on NVIDIA GPUs.
KERNELS = {
    "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128": "convolutions",
    "void cudnn::ops::nchwToNhwcKernel<float>": "other",
    "cudnn::cnn::wgrad2d_c1_k1_nhwc_kernel": "convolutions",
    "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_32x6_tn": "matrix products",
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64_16x6_nn_align4>": "matrix products",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>": "reductions",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor>": "elementwise",
    "void at::native::multi_tensor_apply_kernel<foreach>": "elementwise",
    "Memcpy HtoD (Pinned -> Device)": "copies",
    "void at::native::vectorized_gather_kernel<16, long>": "indexing",
    "mkldnn::_convolution_pointwise": "convolutions",
    "mkldnn::_linear_pointwise": "matrix products",
}


@pytest.mark.parametrize(("name", "kind"), KERNELS.items())
def test_a_kernel_belongs_to_a_class_by_its_name(name, kind):
    assert class_of(name) == kind


def test_shares_add_up_and_the_largest_is_first():
    found = shares([("gemm", 3.0), ("memcpy", 1.0), ("another_gemm", 3.0), ("idle", 0.0)])
    assert found == {"matrix products": 6 / 7, "copies": 1 / 7}
    assert list(found) == ["matrix products", "copies"]
    assert shares([]) == {}


def test_a_forward_pass_is_mostly_convolutions_and_products_here():
    network = networks.build((4, 84, 84), np.uint8, 4, device="cpu", precision="float32")
    obs = network.to_input(torch.zeros((64, 4, 84, 84), dtype=torch.uint8))

    def step():
        with torch.inference_mode():
            network(obs)

    step()
    found = measure(step, 3, torch.device("cpu"))
    assert sum(found.values()) == pytest.approx(1)
    assert found["convolutions"] + found["matrix products"] > 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
def test_on_a_gpu_the_kernels_own_times_count():
    matrix = torch.ones((2048, 2048), device="cuda")
    found = measure(lambda: matrix @ matrix, 20, torch.device("cuda"))
    assert found["matrix products"] > 0.9
