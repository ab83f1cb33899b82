def get_cann_version(*_):
    return "8.3.RC1"
