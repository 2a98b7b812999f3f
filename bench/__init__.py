"""`python -m bench`: ckptool against torch, cp and other tools, in alternating runs on one machine."""
