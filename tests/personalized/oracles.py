"""One federated round of each method of personalised federated learning, in float64 NumPy, written from its paper.

Parameters are a dict from names to arrays. ``grad(k, w)`` is the gradient of f_k, the mean loss of client k over all
its samples, a dict of the same names; ``loss(k, w)`` is f_k(w). There is no randomness: every gradient is of all
samples, the clients of a round are the list ``chosen``. ``weights[k]`` is the number n_k of samples of client k;
``share`` is a vector [K] of weights of clients (None: all equal) for methods whose papers weigh clients equally, and
whose authors' code, or other code, weighs them by samples. Both are divided by their sum over the clients of the
round.

``start_of_X(first, K, ...)`` is the state before the first round, ``round_of_X(state, chosen, ...)`` the state after a
round (states are never changed in place), ``model_of_X(state, k, ...)`` the parameters that predict at client k.
Each docstring names the algorithm box, and the rule where the authors' code, if any is public, differs from it.
"""

import numpy as np

# --- Parameters as vectors -------------------------------------------------------------------------------------------


def copy(w):
    """Parameters with arrays of their own, in float64."""
    return {name: np.array(value, dtype=np.float64) for name, value in w.items()}


def plus(w, factor, direction):
    """w + factor * direction."""
    return {name: w[name] + factor * direction[name] for name in w}


def minus(w, v):
    """w - v."""
    return {name: w[name] - v[name] for name in w}


def times(factor, w):
    """factor * w."""
    return {name: factor * w[name] for name in w}


def zeros(w):
    """Parameters of zeros in the shapes of w."""
    return {name: np.zeros_like(value, dtype=np.float64) for name, value in w.items()}


def inner(w, v):
    """The inner product over all parameters together."""
    return float(sum(np.sum(w[name] * v[name]) for name in w))


def total(terms):
    """The sum of several parameters."""
    terms = list(terms)
    return {name: sum(term[name] for term in terms) for name in terms[0]}


def average(terms, portions):
    """The sum of portions[i] * terms[i]."""
    return total(times(portion, term) for portion, term in zip(portions, terms, strict=True))


def portions_of(chosen, weights):
    """Weights of the clients of the round, divided by their sum; None weighs them equally."""
    own = np.ones(len(chosen)) if weights is None else np.asarray(weights, dtype=np.float64)[list(chosen)]
    return own / own.sum()


def descend(direction, w, steps, lr):
    """``steps`` steps w <- w - lr * direction(w)."""
    for _ in range(steps):
        w = plus(w, -lr, direction(w))
    return w


def toward(gradient, center, lam):
    """Gradient of f(w) + lam/2 ||w - center||^2, from that of f."""
    return lambda w: plus(gradient(w), lam, minus(w, center))


def with_client(models, k, model):
    """The list with another model for client k."""
    return [model if i == k else other for i, other in enumerate(models)]


def _everybody(chosen, number):
    assert sorted(chosen) == list(range(number)), "the paper has every client in every round"


# --- FedAvg with fine-tuning -----------------------------------------------------------------------------------------


def start_of_fedavg(first):
    """``model``: the server's w."""
    return {"model": copy(first)}


def round_of_fedavg(state, chosen, grad, *, weights, steps, lr):
    """FedAvg: w_k is ``steps`` gradient steps from w on f_k, and w <- sum_k (n_k / n_S) w_k.

    "Communication-Efficient Learning of Deep Networks from Decentralized Data", arXiv 1602.05629, Algorithm 1
    (FederatedAveraging). Weights are n_k; n_S is their sum over the clients of the round (the erratum's m_t; the first
    version of the box divides by the n of all clients). ``weights`` None is the uniform average.
    """
    w = state["model"]
    locals_ = [descend(lambda v, k=k: grad(k, v), w, steps, lr) for k in chosen]
    return {"model": average(locals_, portions_of(chosen, weights))}


def model_of_fedavg(state, k, grad=None, *, steps=0, lr=0.0, lam=0.0):
    """Fine-tuning: ``steps`` steps on f_k(v) + lam/2 ||v - w||^2 from v = w; lam = 0 is the plain one.

    The baseline "FedAvg + fine-tuning" of arXiv 2012.04221 and 2206.07902. The code of the former has the proximal
    term, that of the latter has none and switches from FedAvg to local steps at a fraction of the rounds.
    """
    w = state["model"]
    return descend(toward(lambda v: grad(k, v), w, lam), w, steps, lr)


new_client_of_fedavg = model_of_fedavg


# --- Ditto -----------------------------------------------------------------------------------------------------------


def start_of_ditto(first, number):
    """``model``: the server's w; ``own``: v_k of each client, which starts at w."""
    return {"model": copy(first), "own": [copy(first) for _ in range(number)]}


def round_of_ditto(state, chosen, grad, *, steps, lr, lam, own_steps=None, own_lr=None, share=None):
    """Ditto with FedAvg as the solver of the global problem, both problems side by side.

    "Ditto: Fair and Robust Federated Learning Through Personalization", arXiv 2012.04221, Algorithm 1: a client of the
    round gets w, takes ``steps`` steps on f_k from w (it sends the difference), and ``own_steps`` steps

        v_k <- v_k - own_lr (grad f_k(v_k) + lam (v_k - w)),

    where w is the model received, not the next one. The server adds the mean of the differences: equal weights in the
    FedAvg instance of the box and in the authors' code, whatever the sizes. The code uses one number of steps and one
    learning rate for both problems; those are the defaults of ``own_steps`` and ``own_lr``.
    """
    own_steps = steps if own_steps is None else own_steps
    own_lr = lr if own_lr is None else own_lr
    w, own, differences = state["model"], list(state["own"]), []
    for k in chosen:
        differences.append(minus(descend(lambda v, k=k: grad(k, v), w, steps, lr), w))
        own[k] = descend(toward(lambda v, k=k: grad(k, v), w, lam), own[k], own_steps, own_lr)
    return {"model": plus(w, 1.0, average(differences, portions_of(chosen, share))), "own": own}


def model_of_ditto(state, k):
    """v_k as it is kept at the client."""
    return state["own"][k]


def new_client_of_ditto(state, k, grad, *, steps, lr, lam):
    """The two phases of arXiv 2012.04221: w to its end, then h_k(v; w) = f_k(v) + lam/2 ||v - w||^2 from v = w.

    Algorithm 1 is silent on clients that never took part; this is the paper's other way to v_k, which needs w alone.
    """
    w = state["model"]
    return descend(toward(lambda v: grad(k, v), w, lam), w, steps, lr)


# --- Mean-regularised multi-task learning ----------------------------------------------------------------------------


def start_of_mrmtl(first, number):
    """``mean``: the server's wbar; ``own``: w_k of each client. All are equal at the start."""
    return {"mean": copy(first), "own": [copy(first) for _ in range(number)]}


def round_of_mrmtl(state, chosen, grad, *, steps, lr, lam, share=None, server="uploads"):
    """MR-MTL: ``steps`` steps w_k <- w_k - lr (grad f_k(w_k) + lam (w_k - wbar)) from the client's own w_k.

    "On Privacy and Personalization in Cross-Silo Federated Learning", arXiv 2206.07902, Algorithm A1 (not private; A2
    clips and adds noise). wbar, the mean of the models, is frozen during the round. The paper has all silos in every
    round; the authors' code weighs them by samples, or equally with a flag, and moves wbar by the mean of the changes
    of w_k. For a part of the clients the paper says nothing: ``server`` is "uploads" for the mean of the models sent,
    "changes" for the code's rule. With all clients and equal starts both are the same.
    """
    mean, own = state["mean"], list(state["own"])
    for k in chosen:
        own[k] = descend(toward(lambda v, k=k: grad(k, v), mean, lam), own[k], steps, lr)
    portions = portions_of(chosen, share)
    if server == "uploads":
        return {"mean": average([own[k] for k in chosen], portions), "own": own}
    changes = [minus(own[k], state["own"][k]) for k in chosen]
    return {"mean": plus(mean, 1.0, average(changes, portions)), "own": own}


def model_of_mrmtl(state, k):
    """w_k as it is kept at the client."""
    return state["own"][k]


# --- A shared part and a part of one's own: FedPer, LG-FedAvg, FedBN, FedRep ------------------------------------------


def start_of_partial(first, number, shared, heads=None):
    """``shared``: values of the names shared; ``own``: values of the other names, one dict for each client.

    Every client starts with the part of ``first``, or with its own ``heads[k]`` (FedPer draws them at random).
    """
    heads = [first] * number if heads is None else heads
    return {
        "shared": {name: value for name, value in copy(first).items() if name in shared},
        "own": [{name: value for name, value in copy(head).items() if name not in shared} for head in heads],
    }


def model_of_partial(state, k):
    """The shared part with the client's own."""
    return {**state["shared"], **state["own"][k]}


def _joint_round(state, chosen, grad, weights, steps, lr):
    names, own, uploads = set(state["shared"]), list(state["own"]), []
    for k in chosen:
        w = descend(lambda v, k=k: grad(k, v), model_of_partial(state, k), steps, lr)
        uploads.append({name: value for name, value in w.items() if name in names})
        own[k] = {name: value for name, value in w.items() if name not in names}
    return {"shared": average(uploads, portions_of(chosen, weights)), "own": own}


start_of_fedper = start_of_lg_fedavg = start_of_fedbn = start_of_fedrep = start_of_partial
model_of_fedper = model_of_lg_fedavg = model_of_fedbn = model_of_fedrep = model_of_partial


def round_of_fedper(state, chosen, grad, *, weights, steps, lr):
    """FedPer: ``steps`` steps on the shared base and the client's own head together; the base is averaged by samples.

    "Federated Learning with Personalization Layers", arXiv 1912.00818, Algorithms 1 (client) and 2 (server):
    W_B <- sum_j gamma_j W_B,j with gamma_j = n_j / n. The box has all clients in every round.
    """
    return _joint_round(state, chosen, grad, weights, steps, lr)


def round_of_lg_fedavg(state, chosen, grad, *, weights, steps, lr):
    """LG-FedAvg: ``steps`` steps on the client's own representation and the shared layers above it together.

    "Think Locally, Act Globally: Federated Learning with Local and Global Representations", arXiv 2001.01523,
    Algorithm 1: ``shared`` are the upper layers, averaged by samples, as in FedAvg. The authors' code averages them
    equally (``weights`` None) and starts from the model of a run of FedAvg.
    """
    return _joint_round(state, chosen, grad, weights, steps, lr)


def new_client_of_lg_fedavg(state):
    """Models of all clients; their outputs are averaged for an unknown device (arXiv 2001.01523, "new test")."""
    return [model_of_partial(state, k) for k in range(len(state["own"]))]


def round_of_fedbn(state, chosen, grad, *, steps, lr, share=None):
    """FedBN: FedAvg of all parameters but those of batch normalisation, which stay with the client.

    "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", arXiv 2102.07623, Algorithm 1: equal
    weights 1/K, all clients; so is the code. Running means and variances of those layers stay with the client as well;
    they have no gradient and are not part of this oracle.
    """
    return _joint_round(state, chosen, grad, share, steps, lr)


def _head_steps(state, k, grad, start, steps, lr):
    shared = state["shared"]

    def direction(head):
        gradient = grad(k, {**shared, **head})
        return {name: gradient[name] for name in head}

    return descend(direction, start, steps, lr)


def round_of_fedrep(state, chosen, grad, *, head_steps, lr, body_steps=1, share=None):
    """FedRep: ``head_steps`` steps on the client's own head, then ``body_steps`` on the body, the other part fixed.

    "Exploiting Shared Representations for Personalized Federated Learning", arXiv 2102.07078, Algorithm 1: the head
    starts where it ended in the client's last round, the body takes one step, the server averages bodies equally. The
    authors' code takes one epoch for the body, and weighs by samples (``share``).
    """
    shared, own, uploads = state["shared"], list(state["own"]), []
    for k in chosen:
        own[k] = _head_steps(state, k, grad, own[k], head_steps, lr)

        def direction(body, k=k):
            gradient = grad(k, {**body, **own[k]})
            return {name: gradient[name] for name in body}

        uploads.append(descend(direction, shared, body_steps, lr))
    return {"shared": average(uploads, portions_of(chosen, share)), "own": own}


def new_client_of_fedrep(state, k, grad, head, *, head_steps, lr):
    """A new client trains a head alone, from ``head``, under the fixed body (arXiv 2102.07078, on new clients)."""
    return {**state["shared"], **_head_steps(state, k, grad, copy(head), head_steps, lr)}


# --- SCAFFOLD --------------------------------------------------------------------------------------------------------


def start_of_scaffold(first, number):
    """``model``: the server's x; ``control``: its c; ``own``: c_k of each client. All controls start at zero."""
    return {"model": copy(first), "control": zeros(first), "own": [zeros(first) for _ in range(number)]}


def round_of_scaffold(state, chosen, grad, *, steps, lr, server_lr=1.0, option=2):
    """SCAFFOLD: steps y <- y - lr (grad f_k(y) - c_k + c) from y = x, then new controls.

    "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", arXiv 1910.06378, Algorithm 1: c_k is
    then (option I) grad f_k(x), at the model received, or (option II) c_k - c + (x - y) / (steps lr); the server
    x <- x + server_lr mean_S(y_k - x) and c <- c + (|S| / K) mean_S(change of c_k). Weights are equal, K counts all
    clients, so that c stays the mean of all c_k.
    """
    x, c, own = state["model"], state["control"], list(state["own"])
    moves, changes = [], []
    for k in chosen:

        def direction(y, k=k):
            return plus(minus(grad(k, y), own[k]), 1.0, c)

        y = descend(direction, x, steps, lr)
        new = grad(k, x) if option == 1 else plus(minus(own[k], c), 1.0 / (steps * lr), minus(x, y))
        moves.append(minus(y, x))
        changes.append(minus(new, own[k]))
        own[k] = new
    return {
        "model": plus(x, server_lr / len(chosen), total(moves)),
        "control": plus(c, 1.0 / len(own), total(changes)),
        "own": own,
    }


def model_of_scaffold(state, k=None):
    """x, the same at every client."""
    return state["model"]


# --- pFedMe ----------------------------------------------------------------------------------------------------------


def start_of_pfedme(first, number):
    """``model``: the server's w; ``own``: the personal theta_k of each client."""
    return {"model": copy(first), "own": [copy(first) for _ in range(number)]}


def round_of_pfedme(
    state, chosen, grad, *, steps, lr, lam, inner_steps, inner_lr, beta=1.0, trained=None, warm=True, share=None
):
    """pFedMe: ``steps`` steps on the Moreau envelope F_k(w) = min_theta f_k(theta) + lam/2 ||theta - w||^2.

    "Personalized Federated Learning with Moreau Envelopes", arXiv 2006.08848, Algorithm 1. From w_k = w, ``steps``
    times: theta is ``inner_steps`` gradient steps of rate ``inner_lr`` on f_k(theta) + lam/2 ||theta - w_k||^2, then
    w_k <- w_k - lr lam (w_k - theta). The server: w <- (1 - beta) w + beta mean_S(w_k), equal weights in the box, by
    samples in the authors' code (``share``).

    The box lets all clients work and averages those of S: ``trained`` lists who works (None: the clients of S alone,
    which gives the same w and leaves theta of the others). The box asks for an approximate minimiser and names no
    start; the code starts theta at w and then from the last theta (``warm``), False starts it at w_k each time.
    theta_k is that of the last minimisation, before the last step of w_k. (The code's list of personal parameters is
    the optimizer's own, which the step on w_k overwrites: it seems to predict by w_k.)
    """
    w, own, ends = state["model"], list(state["own"]), {}
    for k in sorted(set(chosen) | set(chosen if trained is None else trained)):
        w_k = theta = w
        for _ in range(steps):
            theta = _proximal_point(k, grad, theta if warm else w_k, w_k, lam, inner_steps, inner_lr)
            w_k = plus(w_k, -lr * lam, minus(w_k, theta))
        own[k], ends[k] = theta, w_k
    mean = average([ends[k] for k in chosen], portions_of(chosen, share))
    return {"model": plus(times(1.0 - beta, w), beta, mean), "own": own}


def _proximal_point(k, grad, start, center, lam, steps, lr):
    return descend(toward(lambda v: grad(k, v), center, lam), start, steps, lr)


def model_of_pfedme(state, k):
    """theta_k of the client's last round."""
    return state["own"][k]


def new_client_of_pfedme(state, k, grad, *, lam, inner_steps, inner_lr):
    """theta_k(w), the personal model by its definition (arXiv 2006.08848, equation of the Moreau envelope)."""
    return _proximal_point(k, grad, state["model"], state["model"], lam, inner_steps, inner_lr)


# --- Per-FedAvg ------------------------------------------------------------------------------------------------------


def start_of_perfedavg(first):
    """``model``: the server's w."""
    return {"model": copy(first)}


def round_of_perfedavg(state, chosen, grad, *, steps, alpha, beta, order="first", delta=1e-3, share=None):
    """Per-FedAvg: ``steps`` steps of rate beta on F_k(w) = f_k(w - alpha grad f_k(w)), averaged equally.

    "Personalized Federated Learning: A Meta-Learning Approach", arXiv 2002.07948, Algorithm 1: with v = w - alpha
    grad f_k(w), the step is w <- w - beta (I - alpha H_k(w)) grad f_k(v). ``order`` "first" (Per-FedAvg FO) leaves H_k
    out; "free" (HF) puts, for u = grad f_k(v),

        H_k(w) u ~ (grad f_k(w + delta u) - grad f_k(w - delta u)) / (2 delta).

    The three batches of a step are all samples here. The code of arXiv 2006.08848 weighs by samples (``share``).
    """
    w = state["model"]

    def direction(v, k):
        u = grad(k, plus(v, -alpha, grad(k, v)))
        if order == "first":
            return u
        curved = minus(grad(k, plus(v, delta, u)), grad(k, plus(v, -delta, u)))
        return plus(u, -alpha / (2.0 * delta), curved)

    locals_ = [descend(lambda v, k=k: direction(v, k), w, steps, beta) for k in chosen]
    return {"model": average(locals_, portions_of(chosen, share))}


def model_of_perfedavg(state, k, grad, *, alpha, steps=1):
    """One step of rate alpha on f_k from w (the paper's personal model, for new clients too)."""
    return descend(lambda v: grad(k, v), state["model"], steps, alpha)


new_client_of_perfedavg = model_of_perfedavg


# --- APFL ------------------------------------------------------------------------------------------------------------


def start_of_apfl(first, number, alpha):
    """``model``: the server's w; ``own``: v_k; ``alpha``: [K] mixing weights."""
    return {
        "model": copy(first),
        "own": [copy(first) for _ in range(number)],
        "alpha": np.full(number, alpha, dtype=np.float64) if np.ndim(alpha) == 0 else np.array(alpha, dtype=np.float64),
    }


def _mixed(alpha, v, w):
    return plus(times(alpha, v), 1.0 - alpha, w)


def round_of_apfl(state, chosen, grad, *, steps, lr, adapt=False, alpha_lr=None, share=None):
    """APFL: a client trains w_k for the server, and v_k such that vbar = alpha_k v_k + (1 - alpha_k) w_k fits it.

    "Adaptive Personalized Federated Learning", arXiv 2003.13461, Algorithm 1 (Local Descent APFL). Each step takes all
    gradients at the old point: w_k <- w_k - lr grad f_k(w_k), v_k <- v_k - lr alpha_k grad f_k(vbar), the gradient of
    f_k(vbar) with respect to v_k. w_k starts the round at w, and vbar is taken with it. The server averages w_k
    equally.

    ``adapt``: once a round, at the first step, alpha_k <- alpha_k - alpha_lr <v_k - w_k, grad f_k(vbar)>, clipped to
    [0, 1] ("at every communication round"; ``alpha_lr`` is lr by default, as in the paper). The step of v_k beside it
    has the old alpha_k. The authors' code (FedTorch) differs: it mixes outputs instead of parameters, takes the
    gradient of v_k at the new w_k, updates alpha_k after both with other factors and with a ridge of 0.02 alpha_k.
    """
    alpha_lr = lr if alpha_lr is None else alpha_lr
    own, alphas, ends = list(state["own"]), state["alpha"].copy(), []
    for k in chosen:
        w, v = state["model"], own[k]
        for step in range(steps):
            alpha = alphas[k]
            at_mixed = grad(k, _mixed(alpha, v, w))
            if adapt and step == 0:
                alphas[k] = np.clip(alpha - alpha_lr * inner(minus(v, w), at_mixed), 0.0, 1.0)
            w, v = plus(w, -lr, grad(k, w)), plus(v, -lr * alpha, at_mixed)
        own[k] = v
        ends.append(w)
    return {"model": average(ends, portions_of(chosen, share)), "own": own, "alpha": alphas}


def model_of_apfl(state, k):
    """alpha_k v_k + (1 - alpha_k) w with the averaged w (the box's output; the code takes the client's own w_k)."""
    return _mixed(state["alpha"][k], state["own"][k], state["model"])


# --- IFCA ------------------------------------------------------------------------------------------------------------


def start_of_ifca(firsts):
    """``models``: the server's theta_j, which must differ at the start."""
    return {"models": [copy(first) for first in firsts]}


def cluster_of_ifca(state, k, loss):
    """argmin_j f_k(theta_j), the first one of equals."""
    return int(np.argmin([loss(k, theta) for theta in state["models"]]))


def round_of_ifca(state, chosen, grad, loss, *, lr, steps=1, averaging="model", machines=None, share=None):
    """IFCA: each client joins the model of least loss, and changes that model alone.

    "An Efficient Framework for Clustered Federated Learning", arXiv 2006.04088, Algorithm 1. Option II, ``averaging``
    "model": theta_j is the mean of ``steps`` gradient steps from theta_j by the clients of cluster j, equal weights
    (``share``: the authors' FEMNIST code weighs by samples). Option I, "gradient": theta_j <- theta_j - (lr / m) sum of
    grad f_k(theta_j) over the clients of cluster j; m is the number of machines, not of those in the cluster:
    ``machines``, by default those of the round. (The box takes a part of the machines and divides by m; the code has
    all of them in every round.) A model without clients stays, as in the code; the box would divide by zero.
    """
    cluster = {k: cluster_of_ifca(state, k, loss) for k in chosen}
    models = []
    for j, theta in enumerate(state["models"]):
        members = [k for k in chosen if cluster[k] == j]
        if not members:
            models.append(theta)
        elif averaging == "gradient":
            number = len(chosen) if machines is None else machines
            models.append(plus(theta, -lr / number, total(grad(k, theta) for k in members)))
        else:
            ends = [descend(lambda v, k=k: grad(k, v), theta, steps, lr) for k in members]
            models.append(average(ends, portions_of(members, share)))
    return {"models": models}


def model_of_ifca(state, k, loss):
    """The model of least loss at the client, chosen anew; for new clients too."""
    return state["models"][cluster_of_ifca(state, k, loss)]


new_client_of_ifca = model_of_ifca


# --- FedEM -----------------------------------------------------------------------------------------------------------


def start_of_fedem(firsts, number):
    """``models``: the server's components theta_m, which must differ; ``pi``: [K, M] mixing weights, 1/M first."""
    return {
        "models": [copy(first) for first in firsts],
        "pi": np.full((number, len(firsts)), 1.0 / len(firsts)),
    }


def responsibilities(k, models, pi, sample_losses):
    """E step: q[i, m] proportional to pi[m] exp(-l(theta_m; sample i)), rows of sum 1."""
    with np.errstate(divide="ignore"):
        scores = np.log(pi)[None, :] - np.stack([sample_losses(k, theta) for theta in models], axis=1)
    q = np.exp(scores - scores.max(axis=1, keepdims=True))
    return q / q.sum(axis=1, keepdims=True)


def round_of_fedem(state, chosen, sample_losses, weighted_grad, *, weights, steps, lr, absent="out"):
    """FedEM: E step with the old pi, M step of pi, then ``steps`` gradient steps of each component.

    "Federated Multi-Task Learning under a Mixture of Distributions", arXiv 2108.10252, Algorithm 1 (FedEM) and its
    LocalSolver: q_i = responsibilities, pi_k = mean_i q_i, theta_m,k from theta_m by steps on (1/n_k) sum_i q_im l_i,
    theta_m <- sum_k (n_k / n) theta_m,k. ``sample_losses(k, w)`` is [n_k], negative log-likelihoods up to a constant
    that components share; ``weighted_grad(k, w, q)`` is the gradient of (1/n_k) sum_i q_i l_i(w), divided by n_k and
    not by sum_i q_i, as in the authors' code.

    The box has all clients. For a part of them, ``absent`` "out" averages the clients of the round with n_k / n_S;
    "stay" averages all with n_k / n, where those absent hold the old theta_m, as in the code.
    """
    pi, uploads = state["pi"].copy(), []
    for k in chosen:
        q = responsibilities(k, state["models"], pi[k], sample_losses)
        pi[k] = q.mean(axis=0)
        uploads.append(
            [
                descend(lambda v, k=k, q=q[:, m]: weighted_grad(k, v, q), theta, steps, lr)
                for m, theta in enumerate(state["models"])
            ]
        )
    weights = np.asarray(weights, dtype=np.float64)
    part = 1.0 if absent == "out" else weights[list(chosen)].sum() / weights.sum()
    portions = part * portions_of(chosen, weights)
    models = [
        plus(times(1.0 - part, theta), 1.0, average([upload[m] for upload in uploads], portions))
        for m, theta in enumerate(state["models"])
    ]
    return {"models": models, "pi": pi}


def model_of_fedem(state, k):
    """(pi_k, components): predictions, as probabilities, are mixed by pi_k of the client's last round."""
    return state["pi"][k], state["models"]


def new_client_of_fedem(state, k, sample_losses, *, rounds):
    """pi of a client by E and M steps from 1/M with fixed components (arXiv 2108.10252, on unseen clients)."""
    pi = np.full(len(state["models"]), 1.0 / len(state["models"]))
    for _ in range(rounds):
        pi = responsibilities(k, state["models"], pi, sample_losses).mean(axis=0)
    return pi, state["models"]


# --- FedU ------------------------------------------------------------------------------------------------------------


def start_of_fedu(first, number):
    """``own``: w_k of each client, which the server holds too."""
    return {"own": [copy(first) for _ in range(number)]}


def round_of_fedu(state, chosen, grad, graph, *, steps, lr, eta, server_lr=None, absent="out"):
    """FedU: ``steps`` steps on f_k from w_k, then the server moves the models along the Laplacian of the graph.

    "FedU: A Unified Framework for Federated Multi-Task Learning with Laplacian Regularization", arXiv 2102.07148,
    Algorithm 1, for sum_k f_k(w_k) + (eta/4) sum_kl a_kl ||w_k - w_l||^2 with a symmetric ``graph`` a [K, K]:

        w_k <- w_k,R - server_lr eta sum_l a_kl (w_k,R - w_l,R),   all k at once,

    with server_lr = lr * steps by default. Neighbors that are not in the round are left out, as in the authors' code
    (``absent`` "out"); "stay" keeps them in the sum with their old models. The last version of the code has a factor
    1/2 before the sum and no longer fills the sum; the version before has neither fault. The code also updates one
    client after the other, each with its neighbours' new models.
    """
    server_lr = lr * steps if server_lr is None else server_lr
    ends, own = list(state["own"]), list(state["own"])
    for k in chosen:
        ends[k] = descend(lambda v, k=k: grad(k, v), own[k], steps, lr)
    for k in chosen:
        neighbours = [j for j in (chosen if absent == "out" else range(len(own))) if j != k]
        pulls = [times(graph[k][j], minus(ends[k], ends[j])) for j in neighbours]
        own[k] = plus(ends[k], -server_lr * eta, total([zeros(ends[k]), *pulls]))
    return {"own": own}


def model_of_fedu(state, k):
    """w_k."""
    return state["own"][k]


# --- FedAMP ----------------------------------------------------------------------------------------------------------


def start_of_fedamp(firsts):
    """``own``: w_k of each client, which the server holds too."""
    return {"own": [copy(first) for first in firsts]}


def clouds_of_fedamp(models, *, sigma, alpha):
    """u_i = (1 - alpha sum_j A'(d_ij)) w_i + alpha sum_j A'(d_ij) w_j with A'(d) = exp(-d / sigma) / sigma.

    d_ij is the squared distance over all parameters, A(d) = 1 - exp(-d / sigma) the paper's attention-inducing
    function. The gradient of A(||w_i - w_j||^2) has a factor 2, which the paper's u_i does not have.
    """
    clouds = []
    for i, w in enumerate(models):
        cloud = w
        for j, other in enumerate(models):
            if j != i:
                apart = minus(w, other)
                cloud = plus(cloud, -alpha * np.exp(-inner(apart, apart) / sigma) / sigma, apart)
        clouds.append(cloud)
    return clouds


def heuristic_clouds_of_fedamp(models, *, scale, own_weight):
    """HeurFedAMP: u_i = own_weight w_i + (1 - own_weight) softmax_{j != i}(scale cos(w_i, w_j)) . w_j."""
    clouds = []
    for i, w in enumerate(models):
        others = [other for j, other in enumerate(models) if j != i]
        cosines = [inner(w, other) / np.sqrt(inner(w, w) * inner(other, other)) for other in others]
        attention = np.exp(scale * np.array(cosines))
        attention *= (1.0 - own_weight) / attention.sum()
        clouds.append(plus(times(own_weight, w), 1.0, average(others, attention)))
    return clouds


def round_of_fedamp(state, chosen, grad, *, steps, lr, lam, sigma, alpha, clouds=None):
    """FedAMP: clouds of the old models, then ``steps`` steps on f_i(w) + lam/(2 alpha) ||w - u_i||^2 from w_i.

    "Personalized Cross-Silo Federated Learning on Non-IID Data", arXiv 2007.03797, Algorithm 1. The paper takes the
    minimiser and all clients in every round; steps start at the client's own w_i, as in PFLlib's code.
    ``clouds``: other clouds, such as those of the heuristic.
    """
    _everybody(chosen, len(state["own"]))
    clouds = clouds_of_fedamp(state["own"], sigma=sigma, alpha=alpha) if clouds is None else clouds
    return {
        "own": [
            descend(toward(lambda v, k=k: grad(k, v), clouds[k], lam / alpha), w, steps, lr)
            for k, w in enumerate(state["own"])
        ]
    }


def model_of_fedamp(state, k):
    """w_k."""
    return state["own"][k]


# --- FedDyn ----------------------------------------------------------------------------------------------------------


def start_of_feddyn(first, number):
    """``model``: the server's theta; ``h``: its mean of gradients; ``own``: g_k kept by each client, zero."""
    return {"model": copy(first), "h": zeros(first), "own": [zeros(first) for _ in range(number)]}


def round_of_feddyn(state, chosen, grad, *, steps, lr, alpha):
    """FedDyn: theta_k is ``steps`` steps on f_k(v) - <g_k, v> + alpha/2 ||v - theta||^2 from theta.

    "Federated Learning Based on Dynamic Regularization", arXiv 2111.04263, Algorithm 1: g_k <- g_k - alpha (theta_k -
    theta); the server h <- h - (alpha / K) sum_S (theta_k - theta), K counts all clients; theta <- mean_S(theta_k) -
    h / alpha. The box asks for the minimiser. Weights are equal; the authors' code weighs f_k by samples by means of
    alpha_k = alpha / (K n_k / n), and keeps -g_k / alpha.
    """
    theta, own, ends = state["model"], list(state["own"]), []
    for k in chosen:

        def direction(v, k=k):
            return plus(minus(grad(k, v), own[k]), alpha, minus(v, theta))

        end = descend(direction, theta, steps, lr)
        own[k] = plus(own[k], -alpha, minus(end, theta))
        ends.append(end)
    h = plus(state["h"], -alpha / len(own), total(minus(end, theta) for end in ends))
    return {"model": plus(average(ends, portions_of(chosen, None)), -1.0 / alpha, h), "h": h, "own": own}


def model_of_feddyn(state, k=None):
    """theta, the same at every client."""
    return state["model"]


# --- q-FFL -----------------------------------------------------------------------------------------------------------


def start_of_qffl(first):
    """``model``: the server's w."""
    return {"model": copy(first)}


def _fair_step(w, losses, directions, q, lipschitz):
    deltas, scales = [], []
    for value, direction in zip(losses, directions, strict=True):
        deltas.append(times(value**q, direction))
        curve = q * value ** (q - 1.0) * inner(direction, direction) if q else 0.0
        scales.append(curve + lipschitz * value**q)
    return {"model": plus(w, -1.0 / sum(scales), total(deltas))}


def round_of_qfedsgd(state, chosen, grad, loss, *, q, lipschitz):
    """q-FedSGD: w <- w - sum_S F_k^q g_k / sum_S (q F_k^(q-1) ||g_k||^2 + L F_k^q).

    "Fair Resource Allocation in Federated Learning", arXiv 1905.10497, Algorithm 1, for sum_k p_k f_k^(q+1) / (q + 1);
    g_k = grad f_k(w), F_k = f_k(w).
    Clients are drawn with p_k = n_k / n, so that the sums have no weights. The authors' code adds 1e-10 to F_k.
    """
    w = state["model"]
    return _fair_step(w, [loss(k, w) for k in chosen], [grad(k, w) for k in chosen], q, lipschitz)


def round_of_qfedavg(state, chosen, grad, loss, *, q, lipschitz, steps, lr):
    """q-FedAvg: q-FedSGD with L (w - w_k) for the gradient, w_k being ``steps`` steps from w on f_k.

    arXiv 1905.10497, Algorithm 2; the learning rate ``lr`` is 1 / L in the paper's experiments. F_k is the loss at w.
    """
    w = state["model"]
    ends = [descend(lambda v, k=k: grad(k, v), w, steps, lr) for k in chosen]
    moves = [times(lipschitz, minus(w, end)) for end in ends]
    return _fair_step(w, [loss(k, w) for k in chosen], moves, q, lipschitz)


def model_of_qffl(state, k=None):
    """w, the same at every client."""
    return state["model"]


# --- Agnostic federated learning -------------------------------------------------------------------------------------


def start_of_afl(first, number, mixture=None):
    """``model``: w; ``mixture``: lambda [K]; ``mean``, ``mean_mixture``: averages over ``rounds`` rounds."""
    mixture = np.full(number, 1.0 / number) if mixture is None else np.array(mixture, dtype=np.float64)
    return {
        "model": copy(first),
        "mixture": mixture,
        "mean": zeros(first),
        "mean_mixture": np.zeros(number),
        "rounds": 0,
    }


def onto_simplex(y):
    """The nearest point of {lambda >= 0, sum lambda = 1}, by the threshold of the sorted entries."""
    ordered = np.sort(y)[::-1]
    surplus = (np.cumsum(ordered) - 1.0) / np.arange(1, len(y) + 1)
    return np.maximum(y - surplus[np.nonzero(ordered > surplus)[0][-1]], 0.0)


def round_of_afl(state, chosen, grad, loss, *, lr, mixture_lr):
    """AFL: a gradient step on w and a projected ascent on lambda for sum_k lambda_k f_k(w), both at the old pair.

    "Agnostic Federated Learning", arXiv 1902.00146, Algorithm 1 (Stochastic-AFL): w <- w - lr sum_k lambda_k
    grad f_k(w), lambda <- projection of lambda + mixture_lr (f_1(w), ..., f_K(w)) onto the simplex, here the whole one.
    All clients take part. The result is the average of the iterates, here of those after each round, as in the code of
    arXiv 1905.10497 for this method.
    """
    _everybody(chosen, len(state["mixture"]))
    w, mixture, rounds = state["model"], state["mixture"], state["rounds"]
    clients = range(len(mixture))
    new = plus(w, -lr, average([grad(k, w) for k in clients], mixture))
    new_mixture = onto_simplex(mixture + mixture_lr * np.array([loss(k, w) for k in clients]))
    return {
        "model": new,
        "mixture": new_mixture,
        "mean": plus(state["mean"], 1.0 / (rounds + 1), minus(new, state["mean"])),
        "mean_mixture": state["mean_mixture"] + (new_mixture - state["mean_mixture"]) / (rounds + 1),
        "rounds": rounds + 1,
    }


def model_of_afl(state, k=None, *, averaged=True):
    """The average of the iterates (the paper's result), or the last one."""
    return state["mean"] if averaged else state["model"]
